"""`baton doctor`: what is wrong with this machine, a store, a model folder, a router or a cluster.

One module per subject yields findings; `examination` runs them side by side, each with a deadline.
No check changes anything. What a finding says of a cause that also ends a start comes from the
package that finds it there, so both name the same remedy.
"""
