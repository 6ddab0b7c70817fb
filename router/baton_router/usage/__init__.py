"""The pool's books: calls and tokens of this router, sums of all entries, prices."""
