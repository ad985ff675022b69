"""Why a check is red: decisions and mistakes as hypotheses, else the pattern of what differs."""
