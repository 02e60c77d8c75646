<?php
// Shutdown functions and destructors have their say, undisturbed by repeated cancels. Their output goes nowhere.
class Note
{
    public function __construct(public string $file)
    {
    }

    public function __destruct()
    {
        file_put_contents($this->file, "destructor\n", FILE_APPEND);
    }
}
$file = sys_get_temp_dir() . '/atropos-shutdown-test';
@unlink($file);
register_shutdown_function(function () use ($file) {
    http_response_code(200);
    echo "output of a shutdown function\n";
    $begin = microtime(true);
    usleep(150000);
    $slept_ms = (microtime(true) - $begin) * 1000;
    file_put_contents($file, $slept_ms >= 149 ? "slept\n" : "woken after $slept_ms ms\n", FILE_APPEND);
});
register_shutdown_function(fn () => file_put_contents($file, "second\n", FILE_APPEND));
$note = new Note($file);
try {
    usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
    echo "finished\n";
} catch (Throwable) {
    file_put_contents($file, "caught\n", FILE_APPEND);
} finally {
    file_put_contents($file, "finally\n", FILE_APPEND);
}
