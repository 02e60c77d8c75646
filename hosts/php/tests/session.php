<?php
// Holds its session for ?hold seconds. The others of the same session wait for its lock.
session_save_path(sys_get_temp_dir());
session_id($_GET['id'] ?? 'atropostest');
session_start();
$_SESSION['count'] = ($_SESSION['count'] ?? 0) + 1;
usleep((int) (($_GET['hold'] ?? 0) * 1e6));
echo "finished\n";
