"""The scoreboard: what Farflock costs, each number beside a yardstick that ran in the same call."""
