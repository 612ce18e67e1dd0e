"""What each token uses: structures, and the ways to come to one."""
