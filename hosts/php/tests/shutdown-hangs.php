<?php
// Shutdown functions that hang: in a loop, in a call, as a built-in function. Ended by the second rung, once
// atropos.shutdown_grace_ms is over; each of them in its turn.
$how = $_GET['how'] ?? 'busy';
if ($how === 'busy') {
    register_shutdown_function(function () {
        for ($until = microtime(true) + 60; microtime(true) < $until;) {
        }
    });
} elseif ($how === 'call') {
    register_shutdown_function(function () {
        usleep(60000000);
    });
} else {
    register_shutdown_function('usleep', 60000000);
}
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
