"""The data of the studies: ten tables that come with the package, and readers of the image sets' official files.

Nothing is downloaded and nothing unpickled. Every file is checked by SHA-256 before anything of it is handed out: by
that of its bytes, or, of SVHN's .mat files, by those of the pixels and of the labels in them.
"""

from expacc.datasets.images import IMAGES, ImageSet, load_images
from expacc.datasets.tables import TABLES, Table, load_table

__all__ = ["IMAGES", "TABLES", "ImageSet", "Table", "load_images", "load_table"]
