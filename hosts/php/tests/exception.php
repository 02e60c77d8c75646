<?php
// A script that catches everything, in a loop: it cannot catch this.
while (true) {
    try {
        usleep(100000);
        throw new RuntimeException('mine');
    } catch (Throwable) {
    } finally {
        $again = true;
    }
}
