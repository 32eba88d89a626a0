"""The streaming loader: reads a checkpoint from disk once, quantizes it unit by unit and hands it to vLLM.

Importing it imports neither torch nor vLLM.
"""
