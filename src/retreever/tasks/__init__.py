"""Tasks: data, protocol and metric of one setting each."""
