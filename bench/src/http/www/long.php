<?php
/* A request that takes long, in one of several ways; PATH_INFO names it. Written for the bench's cases.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
$seconds = (float) ($_GET['s'] ?? 30);
$end = hrtime(true) + (int) ($seconds * 1e9);
$marks = dirname($_SERVER['DOCUMENT_ROOT']) . '/marks';
/* Tells when it began; renamed, so that nobody reads half a number. */
function mark(string $marks, string $name): void
{
    $name = basename($name);
    file_put_contents("$marks/.$name", hrtime(true));
    rename("$marks/.$name", "$marks/$name");
}
mark($marks, $_SERVER['PATH_INFO'] ?? 'long');
switch ($_GET['how'] ?? 'usleep') {
    case 'usleep': /* one call into the system for all of it */
        usleep((int) ($seconds * 1e6));
        break;
    case 'busy':
        $n = 0;
        while (hrtime(true) < $end) {
            $n = ($n * 31 + 7) % 1000003;
        }
        break;
    case 'flock': /* somebody else has the lock */
        $f = fopen("$marks/lock", 'c');
        flock($f, LOCK_EX);
        break;
    default:
        http_response_code(400);
}
echo "done\n";
