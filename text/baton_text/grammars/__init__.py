"""Grammars: which tokens may come next, so that an answer matches a schema or a regex.

A client's constraint becomes grammar text, which travels with the request; a Matcher follows the
answer's tokens in it. Imports the tokenizer and the forms of calls (`parsers`).

    constraints       a client's constraint as grammar text
    client_schema     a client's JSON schema: its size, its depth, what of it is enforced
    json_schema       the keywords of a schema: enforced, refused or dropped
    finite_schema     parts of a schema that no finite value matches
    schema_parts      what a schema contains and refers to
    property_names    the few names that a pattern of names matches
    lark_syntax       clients' grammars in Lark
    lark              literal text and free text as Lark rules for one tokenizer
    answer_grammar    the grammar of a whole answer: reasoning, content, function calls
    argument_grammar  the arguments of a call, for families that write them one by one
    grammars          compiles grammars for one tokenizer, and keeps the last ones
    matcher           the state of one answer in a grammar
    unique_keys       no key of a JSON object twice
    grammar_text      the parts of a grammar's text, and its size
    refusals          why a grammar does not compile, and where
    errors            GrammarError; llguidance's messages in plain sentences
    limits            limits of grammars, and how they write JSON
"""
