"""How many workers and servers a job needs, from measurements and closed forms."""
