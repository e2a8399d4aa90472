"""Names of the programs of one step of a serving engine, in their order."""

MODEL, SELECT, LOGITS, SAMPLE = "", "select", "logits", "sample"
STEP_PROGRAMS = (MODEL, SELECT, LOGITS, SAMPLE)
