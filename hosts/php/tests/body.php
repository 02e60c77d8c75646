<?php
// Cancelled while PHP still reads a body that does not come whole: not a line of the script runs.
file_put_contents(sys_get_temp_dir() . '/atropos-body-test', strlen($_POST['text'] ?? '') . "\n");
echo "finished\n";
