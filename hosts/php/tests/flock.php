<?php
// Waits for a lock that another request (?hold) has.
$file = fopen(sys_get_temp_dir() . '/atropos-flock-test', 'c');
flock($file, LOCK_EX);
if (isset($_GET['hold'])) {
    usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
}
echo "finished\n";
