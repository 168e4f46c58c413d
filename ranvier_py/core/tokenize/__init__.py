"""What the tokenizer process is asked, and what it answers: values, their bytes, and the work itself."""
