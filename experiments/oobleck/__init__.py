"""Tables and figures of the Oobleck chapter (I. Jang, dissertation, chapter 2 and appendix A)."""
