"""What a converted model is measured by: scores of texts, use of its experts, agreement of its modes."""
