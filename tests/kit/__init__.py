"""Tools that the tests share: emptied tables, threads, gates, waiting, views behind URLs."""
