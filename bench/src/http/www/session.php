<?php
/* A request of a session, which PHP locks from session_start() to the request's end; ?hold=SECONDS keeps it so long.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
$marks = dirname($_SERVER['DOCUMENT_ROOT']) . '/marks';
function mark(string $marks, string $name): void
{
    file_put_contents("$marks/.$name", hrtime(true));
    rename("$marks/.$name", "$marks/$name");
}
$name = basename($_SERVER['PATH_INFO'] ?? 'session');
mark($marks, "$name.began");
session_start();
mark($marks, "$name.locked");
$_SESSION['n'] = ($_SESSION['n'] ?? 0) + 1;
if (isset($_GET['hold'])) {
    usleep((int) ((float) $_GET['hold'] * 1e6));
}
echo "visit {$_SESSION['n']}\n";
