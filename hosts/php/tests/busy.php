<?php
// A loop that calls nothing: only the interrupt flag can end it.
$until = microtime(true) + ($_GET['seconds'] ?? 30);
for ($n = 0; $n < PHP_INT_MAX; $n++) {
    if ($n % 1000000 === 0 && microtime(true) > $until) {
        break;
    }
}
echo "finished\n";
