<?php
// Without httpd the extension loads and does nothing: `make check`. (All other scripts here run in httpd.)
function check(bool $holds, string $what): void
{
    if (!$holds) {
        fwrite(STDERR, "failed: $what\n");
        exit(1);
    }
}
ob_start();
phpinfo(INFO_MODULES);
$info = ob_get_clean();
check(extension_loaded('atropos'), 'the extension is loaded');
check(preg_match('/^mod_atropos => not found/m', $info) === 1, 'phpinfo() says that mod_atropos is not there');
check(preg_match('/^This request => not followed/m', $info) === 1, 'phpinfo() says that nothing is followed');
check(ini_get('atropos.enable') === '1' && ini_get('atropos.shutdown_grace_ms') === '500', 'defaults');
check(ini_set('atropos.enable', '0') === false, 'a script cannot turn it off');
$begin = hrtime(true);
usleep(20000);
check(hrtime(true) - $begin >= 20000000, 'usleep sleeps');
[$a, $b] = stream_socket_pair(STREAM_PF_UNIX, STREAM_SOCK_STREAM, 0);
$server = stream_socket_server('tcp://127.0.0.1:0');
$client = stream_socket_client('tcp://' . stream_socket_get_name($server, false));
$peer = stream_socket_accept($server);
fwrite($peer, "text\n");
check(fgets($client) === "text\n", 'sockets work');
if (extension_loaded('session')) {
    ini_set('session.use_cookies', 0);
    session_save_path(sys_get_temp_dir());
    session_id('atroposcli');
    check(session_start() && session_destroy(), 'sessions work');
}
echo "ok\n";
