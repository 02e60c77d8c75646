<?php
// Waits for a client that does not come.
$server = stream_socket_server('tcp://127.0.0.1:0');
@stream_socket_accept($server, $_GET['seconds'] ?? 30);
echo "finished\n";
