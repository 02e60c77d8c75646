<?php
echo "finished\n";
