"""What comes from files that anyone may have made: read within bounds, validated, shown safely."""
