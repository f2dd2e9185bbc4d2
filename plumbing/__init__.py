"""What stands between the commands and the method: files, checkpoints, building, reports."""
