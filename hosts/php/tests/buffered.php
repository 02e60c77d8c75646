<?php
// Output, headers and a status of its own, none of it sent: all of it goes, the client gets a plain 503.
ob_start(fn ($text) => strtoupper($text));
ob_start();
http_response_code(201);
header('Content-Type: image/png');
header('Content-Length: 12345');
header('Cache-Control: public, max-age=3600');
header('ETag: "x"');
header_register_callback(function () {
    header('HTTP/1.1 200 Fine');
});
echo "part of a page\n";
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
