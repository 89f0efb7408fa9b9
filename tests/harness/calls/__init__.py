"""Which function of the workspace calls which, by the types of fields, parameters and locals."""
