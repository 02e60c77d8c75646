<?php
// An output handler that hangs, at the end of the script or (?early) in the middle of it.
ob_start(function ($text) {
    for ($until = microtime(true) + ($_GET['seconds'] ?? 30); microtime(true) < $until;) {
    }
    return $text;
});
echo "part of a page\n";
if (isset($_GET['early'])) {
    ob_end_flush();
    echo "finished\n";
}
