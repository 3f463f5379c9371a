"""All kinds of Django view behave the same (conformance numbers 41 and 42): the same cases over
each of them."""
