<?php
// Reads a body that does not come (needs enable_post_data_reading=0, or a method PHP does not parse).
echo strlen(file_get_contents('php://input')), "\nfinished\n";
