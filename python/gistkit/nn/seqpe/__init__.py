"""SeqPE: positions read digit by digit, their use in attention, and the two losses for positions beyond training."""
