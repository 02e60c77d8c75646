<?php
// Blocked in one system call, in a script without a loop.
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
