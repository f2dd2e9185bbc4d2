"""The same numbers faster, in less memory, on several GPUs; handed in, never needed."""
