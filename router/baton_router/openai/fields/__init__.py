"""The fields of the API: one table for each kind of body, and what the tables are made of."""
