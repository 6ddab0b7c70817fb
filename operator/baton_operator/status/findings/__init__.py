"""The findings about a pool, a module per condition or group of conditions. Pure.

Each condition type has one function from a `View` to a `Finding`, or to None if the condition does
not apply.
"""
