-- The suite portable: its figures, and the extension in this database.

\ir charge.sql
\ir portable_turns.sql
