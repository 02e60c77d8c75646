<?php
// Writes to a client that does not read.
while (true) {
    echo str_repeat('x', 65536);
}
