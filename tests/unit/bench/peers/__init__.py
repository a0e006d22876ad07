"""The benchmark against peers: statistics, interleaving, set-up, client. Peers themselves are not installed here."""
