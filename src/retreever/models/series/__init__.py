"""Models of irregular time series, the baselines of Human Activity: values, which of them were observed, and times."""
