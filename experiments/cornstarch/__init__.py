"""What both versions of the Cornstarch paper are held against: models, plans, pipelines, attention."""
