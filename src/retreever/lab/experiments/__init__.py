"""The paper's tables and figures: runs, results, tables, figures and the results page, from recipe files."""
