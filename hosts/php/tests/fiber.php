<?php
// Inside a fiber, inside a generator, inside a callback of a built-in function.
$fiber = new Fiber(function () {
    $generator = (function () {
        try {
            yield array_map(fn ($s) => usleep((int) ($s * 1e6)), [$_GET['seconds'] ?? 30]);
        } finally {
            echo "finally\n";
        }
    })();
    foreach ($generator as $x) {
        Fiber::suspend($x);
    }
});
$fiber->start();
echo "finished\n";
