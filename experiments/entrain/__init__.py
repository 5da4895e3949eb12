"""Tables and figures of Entrain (dissertation, chapter 4)."""
