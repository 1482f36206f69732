"""What every measurement of a peer is asked for, for scripts/compare speed."""
import argparse
import os


def parser(doc):
    """An argument parser; doc: the program's description, whose first line is shown."""
    ap = argparse.ArgumentParser(description=doc.split("\n")[0])
    ap.add_argument("-m", "--model", required=True, help="a GGUF file")
    ap.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    ap.add_argument("--prefill", type=int, default=512, help="prompt tokens, one batch (default 512)")
    ap.add_argument("--decode", type=int, default=64, help="single-token steps (default 64)")
    ap.add_argument("--context", type=int, default=128, help="middle of the decode steps' context (default 128)")
    ap.add_argument("--batch", type=int, default=0, help="sequences decoded together, instead of all else")
    ap.add_argument("--reps", type=int, default=3, help="timed repetitions, the median is given (default 3)")
    return ap
