"""Files behind the tasks: where they are found, how they are checked, unpacked, fetched and cached."""
