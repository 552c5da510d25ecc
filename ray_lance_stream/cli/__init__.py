"""The command line. Its modules import Ray and Lance when a command runs, so that `--help` answers at once."""
