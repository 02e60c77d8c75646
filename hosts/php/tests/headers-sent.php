<?php
// Part of the page is out: it must not end as if it were whole.
echo str_repeat("part of a page\n", 100);
flush();
usleep((int) (($_GET['seconds'] ?? 30) * 1e6));
echo "finished\n";
