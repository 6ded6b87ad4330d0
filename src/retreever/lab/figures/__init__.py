"""What a run leaves for people to read: explanations of single searches, figures and tables."""
