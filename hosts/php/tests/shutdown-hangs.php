<?php
// Shutdown functions that hang, in a loop and in a call: ended by the second rung after atropos.shutdown_grace_ms.
register_shutdown_function(function () {
    if (($_GET['how'] ?? 'busy') === 'busy') {
        for ($until = microtime(true) + 60; microtime(true) < $until;) {
        }
    } else {
        usleep(60000000);
    }
});
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
