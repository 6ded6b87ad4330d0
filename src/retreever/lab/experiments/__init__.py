"""The paper's tables and figures: recipe files in, runs, results, tables, figures and the results page out."""
