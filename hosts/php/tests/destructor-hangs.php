<?php
// The script is told to stop; its destructor hangs. Ended by the second rung.
class Hang
{
    public function __destruct()
    {
        usleep(60000000);
    }
}
$hang = new Hang();
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
