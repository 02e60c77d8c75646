<?php
/* Honest work: ?n= rounds of hashing (about 1000 a millisecond), some output, perhaps a session of its own (?sid=).
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
if (isset($_GET['sid'])) {
    session_id('work' . (int) $_GET['sid']);
    session_start();
    $_SESSION['n'] = ($_SESSION['n'] ?? 0) + 1;
}
$h = '';
for ($i = (int) ($_GET['n'] ?? 1000); $i > 0; $i--) {
    $h = md5($h . $i);
}
if (isset($_GET['ms'])) { /* as one that waits for a database */
    usleep((int) $_GET['ms'] * 1000);
}
echo str_repeat("$h\n", 30);
