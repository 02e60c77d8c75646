<?php
// Reads from a peer that says nothing. PHP's streams wait again after a signal, so the socket has to be shut down.
$server = stream_socket_server('tcp://127.0.0.1:0');
$socket = fsockopen('tcp://' . stream_socket_get_name($server, false));
stream_set_timeout($socket, (int) ($_GET['seconds'] ?? 30));
$peer = stream_socket_accept($server);
$text = fread($socket, 100);
// Acting on an answer that nobody gave is what must not happen.
file_put_contents(sys_get_temp_dir() . '/atropos-fsockopen-test', "went on\n");
echo "finished\n";
